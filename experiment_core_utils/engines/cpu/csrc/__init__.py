"""C++ sources of the CPU engines; `cpu/build.py` compiles them where they run."""
