"""What a person may write of a node, and what a node is told."""
