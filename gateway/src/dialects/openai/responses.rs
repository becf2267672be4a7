//! OpenAI's Responses API: requests of items, and responses that are items too, whole or as a stream of typed events. Where
//! the gateway has a store they are kept; elsewhere what needs a kept one is refused by name.

mod client_tools;
pub(super) mod codex_models;
pub(super) mod compact;
mod event;
mod fields;
mod input;
mod output;
mod request;
mod response;
mod settings;
pub(super) mod stored;
mod text_format;
mod tools;
mod writer;

pub(super) use request::parse;
