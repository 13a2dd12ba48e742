"""Bytes by key, on a disk or in a bucket, and who may write there."""
