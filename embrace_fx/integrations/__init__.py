"""Uses `embrace_fx.compile` instead of DDP in Accelerate, Lightning and Transformers; install
`embrace-fx[integrations]`.
"""
