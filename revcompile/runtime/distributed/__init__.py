"""The same training with stages on several ranks, over torch.distributed.

    trainer.DistributedTrainer
      process_groups.join           joins the process group
      collectives                   all ranks agree on what to train
      process_groups.make_layout    which stage is on which rank
      rank_weights.distribute       each rank gets its stages' weights, and no others
      process_groups.open_channels  a channel (p2p) for each direction between two stages
      transport                     threads that send and receive, queues, reductions
      replicas                      averages gradients over copies of the pipeline
      liveness                      finds out which rank is gone, and why

A rank performs its stages' action lists as one process does; only the transport differs. The order
of a stage's actions is fixed, so results do not depend on timing.
"""
