//! The gateway against scripted engines that are real gRPC servers over mutual TLS. No cluster: the routing
//! table is published from memory, or by an API server that serves objects from memory.

// Test helpers may panic as tests may.
#![allow(clippy::unwrap_used)]

mod anthropic;
mod bad_clients;
mod bad_input;
mod batches;
mod body_paths;
mod budgets;
mod cluster;
mod energy;
mod errors;
mod failures;
mod harness;
mod hedges;
mod holding;
mod inbox;
mod kept_responses;
mod keys;
mod limits;
mod mock_provider;
mod mqtt;
mod network;
mod object_server;
mod ollama;
mod ollama_library;
mod ollama_models;
mod ollama_pull;
mod openai_responses;
mod pipelines;
mod poison;
mod pooling;
mod prefixes;
mod prompt_logprobs;
mod provider_limits;
mod providers;
mod responses;
mod resume;
mod routes;
mod sdk;
mod slow_readers;
mod transcripts;
mod why;
#[cfg(target_os = "linux")]
mod zone_capture;
