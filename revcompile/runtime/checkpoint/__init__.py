"""Checkpoints: safetensors and JSON under the original names, written atomically, no pickle.

    trainer's state --save_training--> folder/step_00000120 --merged_state--> trainer's state
                                                            --load_weights---> model's state dict

Only plain trees of values and tensors are stored here: each object makes its own `state_dict`.
"""
