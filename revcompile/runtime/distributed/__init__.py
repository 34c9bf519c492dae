"""The same training with stages on several ranks, over torch.distributed.

    trainer.placement.RankPlacement
      layout.join              joins the process group
      layout.check_ranks_agree all ranks train the same
      layout.make_layout       which stage is on which rank
      rank_weights.distribute  each rank gets its stages' weights, and no others
      channel.open_channels    a channel for each direction between two stages, with its threads
      wire                     messages as bytes
      transport                queues, means over copies of the pipeline, the end of a run
      failures                 finds out which rank is gone, and why

A rank performs its stages' action lists as one process does; only the transport differs. The order
of a stage's actions is fixed, so results do not depend on timing.
"""
