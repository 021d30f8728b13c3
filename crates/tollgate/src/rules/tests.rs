mod corpus;
mod disguise;
mod matching;
mod tariff;
