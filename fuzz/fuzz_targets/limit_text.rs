#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate_testkit::fuzz::limit_text(bytes));
