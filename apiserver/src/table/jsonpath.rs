//! The simple JSONPath that printer columns may use.
