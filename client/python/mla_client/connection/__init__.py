"""How a client reaches its server: channels of gRPC, and control calls over them."""
