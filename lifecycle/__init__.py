"""An explicit state machine for the hand-over of new weights to inference engines."""
