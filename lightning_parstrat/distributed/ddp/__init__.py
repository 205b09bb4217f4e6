"""The parts of ``ddp_tuned`` alone: measuring torch DDP's backward, planning its buckets, exchanging its reducer."""
