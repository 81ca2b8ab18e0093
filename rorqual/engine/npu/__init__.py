"""Engine parts that are specific to Ascend NPUs."""
