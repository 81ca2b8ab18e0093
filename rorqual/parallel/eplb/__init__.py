"""Which expert lies in which slot of which rank: plans, and the loads they are made from."""
