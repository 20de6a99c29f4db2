"""The pipeline: frames in flight over the links to the stages."""
