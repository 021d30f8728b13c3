module tidegate

go 1.22
