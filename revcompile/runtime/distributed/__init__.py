"""distributed: the same training with stages on several ranks, over torch.distributed.

    net.trainer(...) --layout--> who has which stage --handshake--> all ranks agree
                     --share---> each rank has its stages' weights, and no others
                     --links---> one direction between two stages --transport--> messages

A rank runs its stages' action lists with the dispatcher of the in-process engine; only the
transport differs. The order of a stage's actions is fixed, so results do not depend on timing.
"""
