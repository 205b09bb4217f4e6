"""How many ranks there are, how they are started and joined, and which of them are missing."""
