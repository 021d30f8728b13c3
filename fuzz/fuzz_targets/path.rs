#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::rules::fuzz::any_path(bytes));
