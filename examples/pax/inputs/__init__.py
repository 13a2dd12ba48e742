"""Pax's sources of data: SeqIO, C4 and the Lingvo adaptors."""
