"""Which dimension of which array lives on which devices: logical axis words, the mesh, and the mappings between."""
