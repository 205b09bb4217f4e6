"""Starting and joining ranks: how many there are, how they find each other, and which are missing."""
