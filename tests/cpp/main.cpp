// main() for Catch2 v2, which has no library to take it from. v3 links Catch2WithMain instead.
#define CATCH_CONFIG_MAIN
#include "catch.h"
