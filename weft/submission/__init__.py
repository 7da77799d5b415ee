"""Submit runs to Slurm, Kubernetes, SageMaker and SkyPilot.

Read `weft.submission.submit` first; the scripts and manifests are in ``templates/``.
"""
