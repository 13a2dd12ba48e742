"""Data sources of Pax: SeqIO, C4, and adaptors of Lingvo inputs."""
