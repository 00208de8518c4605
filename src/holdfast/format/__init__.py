"""The bytes on storage: names, values, manifest, containers and records. Pure: no torch, no reading or writing."""
