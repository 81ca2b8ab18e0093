"""Expert load balancing (EPLB): the initial placement of experts, and moves while serving."""
