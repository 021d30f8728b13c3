module go-plans

go 1.22

require tollgate v0.0.0

replace tollgate => ../../clients/go
