//! The work that the benchmarks give to the index, the same for the clock (`benches/core.rs`) and for counted instructions
//! (`src/counted.rs`).
//!
//! * Only `kvsync-index`'s public face is used, and payloads are what vLLM 0.32 sends: maps, 64-bit hashes, 16 tokens a
//!   block out of a vocabulary of 152,000.
//! * All of it follows from fixed seeds: two runs do the same work. The index's own tables are seeded by chance
//!   (`hashbrown`), so that counts of instructions differ by some hundredths of a percent.
//! * What a run left behind is looked at ([`Feed::check`], [`Question::ask`]): a benchmark of refused payloads would be fast.

mod prompts;
mod random;
mod wire;
mod work;

pub use prompts::{Held, Question};
pub use random::Random;
pub use work::{BLOCK, Content, Engines, Feed};
