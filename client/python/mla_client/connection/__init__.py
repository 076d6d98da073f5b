"""How a client reaches its server: channels of gRPC, control calls over them, and leases that it
renews."""
