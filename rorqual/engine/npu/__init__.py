"""What an engine on Ascend NPUs does otherwise."""
