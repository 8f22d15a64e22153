"""What the tests of the Triton kernels in Triton's interpreter share: the adapter and the mode of its process."""

TARGET = "attnkit_conformance.adapters.triton_interpreted:Interpreted"
MODE = {"TRITON_INTERPRET": "1"}
