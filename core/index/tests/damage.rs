//! What fuzzing asks, of some thousand damaged seeds: the same each time, and without libFuzzer. `make fuzz` goes on.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[path = "../../fuzz/src/lib.rs"]
mod harness;

/// Bytes by which msgpack types begin or end.
const INTERESTING: [u8; 16] =
    [0x00, 0x7f, 0x80, 0x90, 0x91, 0xa0, 0xc0, 0xc1, 0xc4, 0xcc, 0xcf, 0xd3, 0xdc, 0xdd, 0xdf, 0xff];

/// xorshift64*
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end.max(1)
    }

    fn byte(&mut self) -> u8 {
        match self.below(2) {
            0 => INTERESTING[self.below(INTERESTING.len())],
            _ => self.below(256) as u8,
        }
    }

    fn damaged(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut data = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(data.len());
            let end = (at + self.below(10)).min(data.len());
            match self.below(6) {
                0 | 1 if at < data.len() => data[at] = self.byte(),
                2 => data.insert(at, self.byte()),
                3 => drop(data.drain(at..end)),
                4 => data.truncate(data.len() - self.below(data.len())),
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    let from = self.below(other.len());
                    let to = (from + self.below(40)).min(other.len());
                    data.splice(at..end, other[from..to].iter().copied());
                }
            }
        }
        data
    }
}

fn seeds(of: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(of);
    let mut paths: Vec<_> = fs::read_dir(folder).expect("seeds").map(|entry| entry.expect("a seed").path()).collect();
    paths.sort();
    let seeds: Vec<_> = paths.iter().map(|path| fs::read(path).expect("a seed")).collect();
    assert!(seeds.len() > 20);
    seeds
}

/// Returns all that happened.
fn try_damaged(of: &str, times: usize, target: fn(&[u8]) -> BTreeSet<&'static str>) -> BTreeSet<&'static str> {
    let seeds = seeds(of);
    let mut happened: BTreeSet<_> = seeds.iter().flat_map(|seed| target(seed)).collect();
    let mut random = Random(1);
    for _ in 0..times {
        let data = random.damaged(&seeds);
        match std::panic::catch_unwind(|| target(&data)) {
            Ok(more) => happened.extend(more),
            Err(_) => panic!("found by {} bytes: {data:02x?}", data.len()),
        }
    }
    happened
}

#[test]
fn damaged_payloads() {
    let happened = try_damaged("decode", 20_000, harness::decode);
    let wanted = ["stored", "removed", "cleared", "skipped", "not msgpack", "no batch", "wrong type"];
    assert_eq!(wanted.map(|word| happened.contains(word).then_some(word)), wanted.map(Some));
}

#[test]
fn damaged_images() {
    let happened = try_damaged("image", 20_000, harness::image);
    let wanted = ["taken", "refused", "placed", "copies"];
    assert_eq!(wanted.map(|word| happened.contains(word).then_some(word)), wanted.map(Some));
}

#[test]
fn damaged_lives() {
    let happened = try_damaged("life", 1_500, harness::life);
    let wanted = ["credit", "expected", "capped", "observed_runs", "adopted", "doubtful_missed", "parked", "epochs"];
    assert_eq!(wanted.map(|word| happened.contains(word).then_some(word)), wanted.map(Some));
}
