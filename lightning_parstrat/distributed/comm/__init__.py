"""Process groups, the collectives of buckets, and what ranks tell each other beside them."""
