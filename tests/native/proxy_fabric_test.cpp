// proxy_test with libfabric: provider= and library= choose what the PEs talk through.
#define TSN_WITH_LIBFABRIC
#include "tests/native/proxy_test.cpp"
