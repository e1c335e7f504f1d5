package integration

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestMain(m *testing.M) {
	// GORM's statement cache, one for each handle with PrepareStmt, never ends.
	testdb.Main(m, goleak.IgnoreTopFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}
