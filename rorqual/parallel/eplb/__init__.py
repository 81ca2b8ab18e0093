"""Expert placement: which expert is in which slot of which rank, and the loads it is based on."""
