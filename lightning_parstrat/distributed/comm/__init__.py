"""Process groups, collectives on buckets, and small messages between ranks."""
