//! Measurement.
fn main() {}
