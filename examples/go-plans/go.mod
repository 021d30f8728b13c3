module go-plans

go 1.22

require tidegate v0.0.0

replace tidegate => ../../clients/go
