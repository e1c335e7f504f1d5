package dialect_test

import (
	"testing"

	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }
