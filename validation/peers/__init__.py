"""Other systems that stream or offload a quantised base, measured on the same model.

Each is used through its own public interface, as its package documents it; none of their code is
here, and none is a dependency. See validation/protocols/peers.md.
"""
