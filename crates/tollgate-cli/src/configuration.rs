//! Reading a configuration, and telling what was found in it.

use std::path::Path;

use tollgate::config::{Finding, Loaded, Loader};

use crate::Failure;
use crate::arguments::{StoreChoice, Validate};

/// Reads a configuration for the store that will be used; what is odd about it goes to standard error.
pub(crate) fn load(file: &Path, store: &StoreChoice) -> Result<Loaded, Failure> {
    let mut loader = Loader::new();
    if let Some(url) = store.said() {
        loader = loader.store(url);
    }
    let mut loaded = loader.load(file).map_err(Failure::Configuration)?;
    for finding in loaded.findings.drain(..) {
        tell(finding);
    }
    Ok(loaded)
}

pub(crate) fn validate(arguments: &Validate) -> Result<(), Failure> {
    let loaded = load(&arguments.file, &arguments.store)?;
    println!(
        "{} can be used: {} rules, {} plans",
        arguments.file.display(),
        loaded.rules.rules().len(),
        loaded.rules.plans().len()
    );
    Ok(())
}

fn tell(finding: Finding) {
    eprintln!("{:?}", miette::Report::new(finding));
}
