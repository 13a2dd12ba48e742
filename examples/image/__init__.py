"""Classifies images in the per-device style of JAXline: pmap and BatchNorm."""
