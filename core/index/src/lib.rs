//! The prefix index of kvsync: KV-cache events in, credit per worker out.
//!
//! **The index never credits a worker with a block that it does not hold, and says at any moment how far it can be
//! trusted.** It is the native twin of the pure-Python reference, which is the specification; one contract suite judges
//! both. Nothing here knows of Python, sockets or HTTP.
//!
//! From the outside in: [`Index`] finds workers and locks them; [`Worker`] has the rules; the store below it has the
//! blocks; [`wire`] reads what engines send; [`key`] names blocks; [`hits`] counts what a cache can serve. Apart from them,
//! [`ids`] takes prompts out of JSON.

pub mod adoption;
pub mod counts;
pub mod event;
pub mod hits;
mod holders;
pub mod ids;
mod image;
pub mod index;
pub mod key;
pub mod observed;
mod page;
pub mod parked;
pub mod removals;
pub mod shared;
mod steps;
mod store;
mod table;
pub mod trail;
pub mod wire;
pub mod worker;

pub use image::ImageError;
pub use index::{Bounds, Index, Prompt, Registered};
pub use shared::Shared;
pub use worker::{Answer, Description, Facts, Match, Observation, Trust, Worker};
