"""Classifying images in JAXline's classic style: pmap and BatchNorm."""
