"""The planner: by which method each layer of a session comes back, so that the pipeline ends first.

Pure arithmetic over a model's shape, what the store holds, a machine's profile and an engine's
abilities. Knows no tensor, no clock and no file. `docs/worker.md` has the model, `lab/notes/planner.md`
the proofs.
"""
