module tollgate

go 1.22
