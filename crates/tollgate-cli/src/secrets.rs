//! Secrets that are given to the command: in files or in the environment, never as an argument, which `ps` would show.

use std::path::Path;

use tollgate_server::Token;

use crate::Failure;

const TOKEN_VARIABLE: &str = "TOLLGATE_ADMIN_TOKEN";
const PASSWORD_VARIABLE: &str = "TOLLGATE_RESP_PASSWORD";

/// The admin token that somebody chose, if anybody did.
pub(crate) fn admin_token(file: Option<&Path>) -> Result<Option<Token>, Failure> {
    let Some((place, text)) = said(file, TOKEN_VARIABLE)? else { return Ok(None) };
    Token::given(&text).map(Some).map_err(|error| Failure::Token { place, error })
}

/// The password that Redis clients must give, if any.
pub(crate) fn resp_password(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let said = said(file, PASSWORD_VARIABLE)?;
    Ok(said.map(|(_, text)| text.trim_end_matches(['\r', '\n']).to_owned()).filter(|text| !text.is_empty()))
}

/// What a file says, else the environment; and where it was said.
fn said(file: Option<&Path>, variable: &str) -> Result<Option<(String, String)>, Failure> {
    if let Some(file) = file {
        let text = std::fs::read_to_string(file);
        let text = text.map_err(|error| Failure::Unreadable { file: file.to_owned(), error })?;
        return Ok(Some((file.display().to_string(), text)));
    }
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty());
    Ok(text.map(|text| (format!("${variable}"), text)))
}
