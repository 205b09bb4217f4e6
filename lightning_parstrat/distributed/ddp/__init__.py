"""What only ``ddp_tuned`` needs: measuring torch DDP's backward, planning its buckets, exchanging its reducer."""
