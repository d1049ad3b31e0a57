// Defines main() for Catch2 v2, which has no library for it. With v3, tests link Catch2WithMain.
#define CATCH_CONFIG_MAIN
#include "catch.h"
