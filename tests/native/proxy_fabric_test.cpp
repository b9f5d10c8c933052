// proxy_test with libfabric: provider= and library= choose the PEs' transport.
#define TSN_WITH_LIBFABRIC
#include "tests/native/proxy_test.cpp"
