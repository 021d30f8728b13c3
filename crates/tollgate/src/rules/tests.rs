mod disguise;
mod matching;
mod tariff;
