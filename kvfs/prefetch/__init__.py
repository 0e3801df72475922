"""What to bring to this node's store before anybody asks for it: pure decisions, run by a node."""
